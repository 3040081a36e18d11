"""From text to text: the engine, sessions, generation, and the memory that they share."""
