"""Models put together from the parts that a pack names, in numpy; the arithmetic with weights is a backend's."""
