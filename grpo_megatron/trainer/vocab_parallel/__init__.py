"""Quantities of whole vocabularies, which tensor ranks hold in parts."""
