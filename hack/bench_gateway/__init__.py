ENGINE = "engine-0"  # what the stub calls itself, and the grant that it answers under
TOKEN = 7
