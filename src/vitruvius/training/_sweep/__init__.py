"""What a sweep is made of: its masks, how runs are judged, runs side by side, the table."""
