def autoload():
    pass
