// Stands in for a header of Gloo 0.5 that Debian's libgloo-dev leaves out although others include it: used where it is missing
// (cmake/gloo.cmake). It has the same classes with the same members, since they are parts of Gloo's pairs (tcp/pair.h), and of
// their functions the one that is called here: what the others do is inside of the library.
#pragma once

#include <memory>

namespace gloo {

template <typename T>
class NonOwningPtr final {
  std::shared_ptr<T> ptr_;
};

template <typename T>
class ShareableNonOwningPtr;

template <typename T>
class WeakNonOwningPtr final {
 public:
  explicit WeakNonOwningPtr(const ShareableNonOwningPtr<T>& reference) : ptr_(reference.ptr_) {}
  WeakNonOwningPtr() = default;

 private:
  std::weak_ptr<T> ptr_;
};

template <typename T>
class ShareableNonOwningPtr final {
  std::shared_ptr<T> ptr_;
  friend class WeakNonOwningPtr<T>;
};

}  // namespace gloo
