"""What the ranks did in the last step."""
