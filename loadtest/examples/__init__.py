"""Reports that were measured, and what measures them."""
