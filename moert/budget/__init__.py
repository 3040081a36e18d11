"""Divides memory between weights, requests and experts, and lets requests in as far as it goes."""
