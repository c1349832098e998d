// Where the processes of a group meet: a key-value store that the program provides, or one of
// these.
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>

namespace torchft_ext {

// What a program implements over a service that it has (etcd, Redis, a database, ...). Threads: the
// library calls it on one thread of its own for each store, one call at a time; a call may block,
// since callers of the library walk away from it by their own deadlines. Each throws any
// std::exception where the service cannot be reached: configure() then fails with a StoreLostError
// that carries its text. Values are arbitrary bytes, never empty; keys are printable. A generation
// uses a few keys below its prefix, and removes them.
class Store {
 public:
  virtual ~Store();
  virtual void set(const std::string& key, const std::string& value) = 0;
  // nullopt: there is no such key. Must not wait for it.
  virtual std::optional<std::string> get(const std::string& key) = 0;
  // Of a key that is not there: nothing.
  virtual void remove(const std::string& key) = 0;
};

// In this process: for one rank, and for tests. Any thread.
std::shared_ptr<Store> makeMemoryStore();
// Files in a directory that all processes of the group see: of one host, or of a network file
// system whose renames are atomic. Made if it does not exist; what is left in it after a crash may
// be deleted when no group uses it. Throws std::system_error where it cannot be made.
std::shared_ptr<Store> makeFileStore(const std::string& directory);

}  // namespace torchft_ext
