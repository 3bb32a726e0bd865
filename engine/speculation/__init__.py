"""Drafts: what a request may say next, by what followed the same tokens before."""
