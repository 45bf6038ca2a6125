"""The browser view: pages about runs, read from their folders. They never write there."""
