// The fingerprint of the sources that the library was built from.
#include "abi.hpp"

#ifndef GTOPK_SOURCES
#define GTOPK_SOURCES ""
#endif

GTOPK_API const char* sources_fingerprint() { return GTOPK_SOURCES; }
