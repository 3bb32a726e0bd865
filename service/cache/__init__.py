"""What a client is told of the cache: where a prompt's tokens came from, and why not from there."""
