"""The promise on the loss of text not seen yet, and the evidence that it rests on. Decides no widths."""
