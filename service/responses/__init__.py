"""Responses, whatever transport they came by: how one runs, what it told, chains of them."""
