"""The command `moert bench`: how fast a pack runs on this device, and how near that is to the possible speed."""
