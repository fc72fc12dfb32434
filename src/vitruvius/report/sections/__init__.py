"""The room of sections: one file each; a file dropped in here is on the page."""
