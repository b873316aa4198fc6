#pragma once

#include <string>

namespace tessera::app {

/// docs/import-config.md, made from the tables of import_formats(). `tessera_import_docs docs` writes it, and a test compares.
std::string import_reference();

}  // namespace tessera::app
