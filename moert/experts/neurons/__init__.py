"""Single neurons of experts in place of whole ones: only those that fire are read."""
