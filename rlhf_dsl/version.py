"""The version of the package, alone in its file so that set-up reads it without importing the rest."""

VERSION = "0.1.0"
