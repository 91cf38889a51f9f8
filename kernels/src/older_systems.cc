// What a newer compiler's headers ask of the system's libraries, and systems of glibc 2.28 (manylinux_2_28) do not have.
//
// The library is built wherever there is a compiler, and one wheel is to serve every Linux since 2018. Its inlined parts
// of the C++ library would otherwise need GLIBC_2.32 and GLIBCXX_3.4.29.
#include <sstream>

#if defined(__GLIBCXX__)

namespace std {

// XLA's messages are made with it.
template basic_stringstream<char>::basic_stringstream();

[[noreturn]] void __throw_bad_alloc();

// Of arrays larger than there are addresses.
[[noreturn, gnu::visibility("hidden")]] void __throw_bad_array_new_length() { __throw_bad_alloc(); }

}  // namespace std

// Whether locks and shared pointers may save their atomic operations: never, XLA has threads.
extern "C" [[gnu::visibility("hidden")]] char __libc_single_threaded = 0;

#endif
