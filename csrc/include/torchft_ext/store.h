// The key-value store in which the processes of a group meet. The program implements one, or uses
// one of those below.
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>

namespace torchft_ext {

// A program implements this interface over a service that it has (etcd, Redis, a database, ...).
// Threads: the library calls each store on one thread of its own, one call at a time. A call may
// block, because callers of the library stop waiting for it at their own deadlines. If the service
// cannot be reached, a method throws any std::exception. configure() then fails with a
// StoreLostError that contains the exception's text. Values are arbitrary bytes and never empty;
// keys are printable. A generation uses a few keys below its prefix, and removes them.
class Store {
 public:
  virtual ~Store();
  virtual void set(const std::string& key, const std::string& value) = 0;
  // nullopt: there is no such key. Must not wait for it.
  virtual std::optional<std::string> get(const std::string& key) = 0;
  // Does nothing if there is no such key.
  virtual void remove(const std::string& key) = 0;
};

// A store within this process: for one rank, and for tests. Any thread.
std::shared_ptr<Store> makeMemoryStore();
// A store of files in a directory that all processes of the group see: on one host, or on a network
// file system whose renames are atomic. The directory is made if it does not exist. Files that a
// crash left in it may be deleted when no group uses it. Throws std::system_error if the directory
// cannot be made.
std::shared_ptr<Store> makeFileStore(const std::string& directory);

}  // namespace torchft_ext
