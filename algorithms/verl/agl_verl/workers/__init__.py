"""What runs in veRL's training workers."""
