"""The versioned files that stages hand to each other, as frozen dataclasses."""
