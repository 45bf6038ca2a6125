"""The policies that runs have trained: finding them by name, taking them along, serving them."""
