"""What the tests of a plugin share with those of agl itself."""
