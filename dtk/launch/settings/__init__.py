"""Settings of a step that were measured: finding them, keeping them, setting them."""
