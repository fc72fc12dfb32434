"""The sections of a page: one file each; a file dropped in here is on the page."""
