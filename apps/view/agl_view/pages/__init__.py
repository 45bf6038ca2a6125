"""The pages: what each shows, and where that comes from."""
