"""Where images come from: one file per data source, registered by name; a plugin adds its own with `data_source`."""
