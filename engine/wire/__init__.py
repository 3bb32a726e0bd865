"""What crosses the process border: frames and the messages in them; engine and edge share it."""
