/* Marks the functions that Python calls. */
#ifndef SMARTPRUNE_EXPORTED_H
#define SMARTPRUNE_EXPORTED_H
#ifdef _WIN32
#define EXPORTED __declspec(dllexport)
#else
#define EXPORTED
#endif
#endif
