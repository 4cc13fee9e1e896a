"""Modules split over the TP_GROUP, whose ranks work on different samples."""
