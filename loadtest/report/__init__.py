"""What people see: live progress, a table, and one HTML file."""
