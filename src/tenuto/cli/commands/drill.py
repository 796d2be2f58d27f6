EXAMPLES=""
def drill(): pass
