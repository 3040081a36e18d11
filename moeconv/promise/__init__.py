"""What may be said of the loss on text not seen yet, and what that rests on. Decides no widths."""
