"""Where the bytes live: pages for compressed entries, slots for window and overlap rows, tails per request row."""
