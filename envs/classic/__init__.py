"""Classic control, step for step that of Gymnasium."""
