"""Modules split over the TP_GROUP; its ranks work on different samples."""
