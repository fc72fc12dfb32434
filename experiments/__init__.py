"""Campaigns over the papers' claims, what they found, and how tables and figures are made of it."""
