"""Who may use the server: where a connection comes from, whose key it shows, how much that buys."""
