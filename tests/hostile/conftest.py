from tests.support import properties

properties.load()
