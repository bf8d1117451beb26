"""The words for yes and no, in recipes, on the command line and in environment variables."""

#: In lower case; those of upstream's environment variables. YAML has no `1` and `0` among them.
YES = {"true", "yes", "on", "t", "y", "1"}
NO = {"false", "no", "off", "f", "n", "0"}
