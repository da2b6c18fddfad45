// What Python asks the library about itself.
#include "abi.hpp"

#ifndef GTOPK_SOURCES
#define GTOPK_SOURCES ""
#endif

GTOPK_API const char* sources_fingerprint() { return GTOPK_SOURCES; }
