"""Makes a plain model of a run: adapters merged, weights in the dtype asked for, and what that changed."""
