"""An update of one policy's weights, and its checkpoint."""
