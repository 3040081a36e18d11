"""Which expert goes when room is needed, and what the best choice would have been. Pure but for the choice by name."""
