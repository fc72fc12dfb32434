"""AutoAttack's machinery: the named stages, the cascade that runs them, and what it finds."""
