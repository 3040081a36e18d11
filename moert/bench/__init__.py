"""The command `moert bench`: how fast a pack runs on this device, and how close that is to what is possible."""
