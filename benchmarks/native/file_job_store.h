// The store of an elastic job whose members are processes of one host: files in a directory.
#pragma once

#include "membership/store_client.h"

namespace torchft_ext::bench {

// A factory of clients; each call of a client holds the directory's lock. Clients: any thread of
// any process, each its own. The directory is made.
ComparingStoreFactory fileJobStore(const std::string& directory);

}  // namespace torchft_ext::bench
