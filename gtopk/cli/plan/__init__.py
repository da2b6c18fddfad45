"""`gtopk plan`: will it help on a cluster one does not have yet?"""
