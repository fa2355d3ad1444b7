"""Policies side by side at matched budgets: the comparison, the study of write strength, the claims."""
