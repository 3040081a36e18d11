"""What is read of the model that is converted: its files, its architecture, and its experts once it is in memory."""
