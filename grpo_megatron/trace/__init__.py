"""The real trainer at a recipe's real sizes, without its memory: one process plays any rank."""
